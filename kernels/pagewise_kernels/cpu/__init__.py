"""Operations of a decoder layer for CPUs, in C: built when the package is, loaded by ``library``."""
