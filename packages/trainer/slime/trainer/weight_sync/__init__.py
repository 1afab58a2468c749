"""How weights reach the engines: one mechanism a module behind `base.WeightTransport`."""
