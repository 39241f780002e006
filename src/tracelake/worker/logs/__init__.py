"""What attempts and programs print, kept: without secrets, within bounds."""
