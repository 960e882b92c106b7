"""What has to hold for compiled code to be used again, and which of it does not."""
