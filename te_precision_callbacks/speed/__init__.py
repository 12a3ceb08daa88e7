"""What low precision buys: the time and the memory of a model's layers, expected and measured."""
