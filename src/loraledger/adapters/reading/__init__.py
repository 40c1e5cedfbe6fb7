"""An adapter folder as it lies on disk: files, configuration, weights header, modules, identity."""
