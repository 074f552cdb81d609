"""The workload classifier, and learning from a teacher."""
