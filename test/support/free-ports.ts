// Ports for servers that are told which one to take. They lie below those that the kernel gives to whoever asks for any, to
// every outgoing connection too: one of those that is free now is somebody's a moment later.
const [LOWEST, HIGHEST] = [15_000, 32_000];

function holdOne(): Bun.TCPSocketListener {
  for (;;) {
    const port = LOWEST + Math.floor(Math.random() * (HIGHEST - LOWEST));
    try {
      return Bun.listen({ hostname: "127.0.0.1", port, socket: { data() {} } });
    } catch {
      // It is taken.
    }
  }
}

/** Free loopback ports. All are held until all are known, so that none comes twice. */
export function freePorts(count: number): number[] {
  const held = Array.from({ length: count }, holdOne);
  return held.map((listener) => {
    listener.stop(true);
    return listener.port;
  });
}

export const freePort = () => freePorts(1)[0] as number;
