"""Data that stays in a store (s3://, gs://, hf://, https://): indexed once, read while it trains."""
