"""Properties of models that their config.json gives (the images that they read, the experts that they route to), and of
the processor that computes them."""
