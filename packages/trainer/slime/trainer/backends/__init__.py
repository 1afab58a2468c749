"""Where a model lives and how it is trained: one package per backend behind `base.Backend`."""
