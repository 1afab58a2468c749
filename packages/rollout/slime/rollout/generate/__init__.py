"""From leased groups to scored ones. Read `default` first, then `group` and `sample`."""
