// Loaded before every test: what a property is tried on is as long as its arbitrary says. By itself fast-check 4 makes arrays
// and texts of about ten items, whatever `maxLength` allows.
import fc from "fast-check";

fc.configureGlobal({ defaultSizeToMaxWhenMaxSpecified: true });
