"""What a deployment needs beside the packages: images, dashboards, and the check of a GPU."""
