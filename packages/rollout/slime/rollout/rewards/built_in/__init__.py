"""The rewards that `--rm-type` names, one module each; the table in `registry` says which."""
