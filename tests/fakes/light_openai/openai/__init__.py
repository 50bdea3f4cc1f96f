"""In place of `openai`, which takes a second to import, for workers whose environments use the text of answers only."""
