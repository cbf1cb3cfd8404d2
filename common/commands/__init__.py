"""Administrative commands, one file each: what ranks get, what they do, the HTTP endpoints, the router's broadcast."""
