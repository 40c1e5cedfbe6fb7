"""The live kernel on a virtual clock in front of twins, and one run of it as a folder of record files."""
