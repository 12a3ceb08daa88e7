"""Features for Transformer Engine layers, and the namespace API that routes calls to them.

This folder is also a feature folder of plain nvidia-dlfw-inspect, which executes each file in it by path. So a file
here uses absolute imports, may be executed twice without harm, and keeps no state.
"""
