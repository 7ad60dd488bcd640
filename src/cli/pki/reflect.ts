// The X.509 library is put together by a container (tsyringe) that refuses to load without `Reflect.getMetadata`, a
// proposal that no runtime has. All that the two ask, by these two functions, is what decorators or a compiler left
// about the library's classes, and nothing was left: so the honest answer is always nothing. What would store such a
// thing stays away, so that a version which needs it fails at once. Import this before the library.

if (!("getMetadata" in Reflect)) {
  const nothing = { value: () => undefined, configurable: true, writable: true };
  Object.defineProperties(Reflect, { getMetadata: nothing, getOwnMetadata: nothing });
}
