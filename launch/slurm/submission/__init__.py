"""What a user asks for, and the script that sbatch gets."""
