// The floor of a start: a server that answers, and nothing else. Argument: its port.
Bun.serve({ hostname: "127.0.0.1", port: Number(Bun.argv[2]), fetch: () => new Response("ok") });
