"""What a function reaches, what running it changes, and how that is put back."""
