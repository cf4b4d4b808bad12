"""A matcher of captions and pictures, trained apart from the demo checkpoint, that its pictures are measured with."""
