"""What models compute on shares: exponentials, divisions, roots, softmax, convolutions."""
