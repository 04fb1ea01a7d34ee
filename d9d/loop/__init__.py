"""The native training and inference loops."""
