// Preloaded into the MCP example servers, which listen on fixed ports: lets them listen on a free loopback
// port instead, prints it, and ends them as soon as the test that started them is gone.
import net from "node:net";

const listen = net.Server.prototype.listen;

net.Server.prototype.listen = function announce(_port, ...rest) {
  const callback = rest.findLast((argument) => typeof argument === "function");
  this.once("listening", () => {
    process.stdout.write(`\nTEST_SERVER_PORT=${this.address().port}\n`);
  });
  return listen.call(this, Number(process.env.TEST_SERVER_PORT ?? 0), "127.0.0.1", callback);
};

process.stdin.on("end", () => process.exit(0));
process.stdin.on("error", () => process.exit(0));
process.stdin.resume();
