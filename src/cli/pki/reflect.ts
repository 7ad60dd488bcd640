// The X.509 library is put together by a container that refuses to load without `Reflect.getMetadata`, a proposal
// that no runtime has. All that is asked of it there is what decorators left, and no compiler left anything: so
// the honest answer is always nothing. Import this before the library.

if (!("getMetadata" in Reflect)) {
  const nothing = { value: () => undefined, configurable: true, writable: true };
  Object.defineProperties(Reflect, { getMetadata: nothing, getOwnMetadata: nothing });
}
