"""Features for Transformer Engine layers, and the namespace API that routes calls to them.

This folder is also a feature folder of plain nvidia-dlfw-inspect, which executes its files by path. So files here use
absolute imports, may be executed twice, and have no state.
"""
