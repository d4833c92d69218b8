"""What `headgate plan` reads, says and writes."""
