"""The command `report`: runs and models compared."""
