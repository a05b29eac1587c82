"""What a bundle is: the operators of its graph, its files, and the errors of the whole project."""
