"""Training of draft heads: text from the target, losses, loops, evaluation."""
