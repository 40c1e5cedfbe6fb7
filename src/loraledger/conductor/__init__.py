"""Steps the kernel, has its commands performed, and turns both into rows: the one driver of live and replay."""
