"""TokenSpeed's pools."""
