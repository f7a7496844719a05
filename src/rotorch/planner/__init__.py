"""What layouts would hold and send, before anything is started. Pure Python."""
