// The X.509 library uses a container (tsyringe) that refuses to load without `Reflect.getMetadata`, a proposal that no
// runtime has. Both ask these two functions only for metadata that decorators or a compiler left on the library's
// classes. There is none, so the answer is always undefined. The functions that store metadata are left out, so that a
// version which needs them fails at once. Import this before the library.

if (!("getMetadata" in Reflect)) {
  const nothing = { value: () => undefined, configurable: true, writable: true };
  Object.defineProperties(Reflect, { getMetadata: nothing, getOwnMetadata: nothing });
}
