"""How text becomes `RunArgs`: reading, overrides, types, checks. The door is `olmo_hf/config_file.py`."""
