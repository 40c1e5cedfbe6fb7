"""What is tried: settings, profiles and axes made into scenarios, and many of them played at once."""
