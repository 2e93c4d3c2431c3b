"""Models: an embedding, numbered layers and a head; each builds any layer range it is asked for."""
