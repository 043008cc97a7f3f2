"""One request from call to text: checked, prepared, admitted, generated, detokenized."""
