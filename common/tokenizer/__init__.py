"""Text to tokens and, one token at a time, back to text."""
