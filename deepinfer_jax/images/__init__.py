"""Images on their way into a prompt: pixels, features of the tower, spans of rows."""
