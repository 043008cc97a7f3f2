"""Takes one request from call to text: checks, prepares, admits, generates, detokenizes."""
