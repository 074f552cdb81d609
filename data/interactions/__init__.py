"""Data for recommenders: interactions of users with items."""
