"""How a linear map is written. Part of the model: it changes the function, the parameters and the FLOPs."""
