"""The Hugging Face hub: what the local cache holds, and whether the hub answers. Imports nothing of ours."""
