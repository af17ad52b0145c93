"""File to batch on the device."""
