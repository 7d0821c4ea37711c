"""An attention operation for Switchax."""
