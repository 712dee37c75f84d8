"""The migrations, in order, packaged with the service."""
