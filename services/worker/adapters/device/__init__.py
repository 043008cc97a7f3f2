"""Images to blocks of the arena and rows of the device tables."""
