// The same work as a service of Restate, as its documentation has it: the upstream is called in a step that is recorded,
// and its answer is the result. Argument: the upstream's URL. Prints its port.
import { serve, service } from "@restatedev/restate-sdk";

const upstream = Bun.argv[2] ?? "";

const bench = service({
  name: "bench",
  handlers: {
    call: (context, body) =>
      context.run("call", async () => {
        const headers = { "content-type": "application/json" };
        const response = await fetch(upstream, { method: "POST", headers, body: JSON.stringify(body) });
        return response.json();
      }),
  },
});

process.stdout.write(`port ${await serve({ services: [bench], port: 0 })}\n`);
