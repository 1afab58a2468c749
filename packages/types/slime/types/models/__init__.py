"""Models as their config.json describes them: images that they read, experts that they route to."""
