"""Where parameters sit in the logical model: pure integer arithmetic, no torch."""
