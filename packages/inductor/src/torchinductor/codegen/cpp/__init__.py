"""The C++ back end: one header-free translation unit a graph, vectorised by the compiler, parallel by OpenMP."""
