"""Several back ends for one graph: who gets which operators (`placement`), the graphs that they get (`pieces`), and the
program that runs them one after the other (`running`). `driver` is the way through.
"""
